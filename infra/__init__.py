"""The CDK app: a deployment of Tidemill in an AWS account, from one configuration file."""

import os

# The CDK's runtime, which starts when aws_cdk is imported, prints a banner for each Node.js that is
# too new or too old for its makers.
_MAJOR_VERSIONS = ",".join(map(str, range(20, 40)))
os.environ.setdefault("JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION", _MAJOR_VERSIONS)
os.environ.setdefault("JSII_SILENCE_WARNING_DEPRECATED_NODE_VERSION", "1")
os.environ.setdefault("JSII_SILENCE_WARNING_UNTESTED_NODE_VERSION", "1")
