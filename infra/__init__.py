"""The CDK app: a deployment of Tidemill in an AWS account, from one configuration file."""
