"""The CDK app: a deployment of Tidemill in an AWS account, from one configuration file."""

import os

# Importing aws_cdk starts the CDK's runtime, which prints a banner if it does not support the
# installed Node.js.
_MAJOR_VERSIONS = ",".join(map(str, range(20, 40)))
os.environ.setdefault("JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION", _MAJOR_VERSIONS)
os.environ.setdefault("JSII_SILENCE_WARNING_DEPRECATED_NODE_VERSION", "1")
os.environ.setdefault("JSII_SILENCE_WARNING_UNTESTED_NODE_VERSION", "1")
