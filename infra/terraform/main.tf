# A deployment by Terraform: the templates of `make template` as stacks of CloudFormation.
#
#   module "tidemill" {
#     source        = "github.com/…//infra/terraform"
#     templates     = "out/templates"
#     assets_bucket = "my-artifacts"
#   }

terraform {
  required_version = ">= 1.5"
  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.0"
    }
  }
}

variable "templates" {
  description = "The folder that `make template` has written."
  type        = string
}

variable "name" {
  description = "The name of the deployment, as its configuration has it."
  type        = string
  default     = "tidemill"
}

variable "assets_bucket" {
  description = "A bucket in the deployment's region, for templates and the code of Lambdas."
  type        = string
}

variable "assets_prefix" {
  description = "The start of their keys there."
  type        = string
  default     = "tidemill/"
}

variable "tags" {
  description = "Tags of the stacks, which CloudFormation gives to their resources."
  type        = map(string)
  default     = {}
}

locals {
  files = fileset(var.templates, "**")
  # A template's key has its digest: CloudFormation reads the url again when it changes.
  keys = {
    for file in local.files : file => startswith(file, "assets/") ? "${var.assets_prefix}${file}" :
    "${var.assets_prefix}${filemd5("${var.templates}/${file}")}/${file}"
  }
}

resource "aws_s3_object" "file" {
  for_each    = local.files
  bucket      = var.assets_bucket
  key         = local.keys[each.value]
  source      = "${var.templates}/${each.value}"
  source_hash = filemd5("${var.templates}/${each.value}")
}

data "aws_s3_bucket" "assets" {
  bucket = var.assets_bucket
}

resource "aws_cloudformation_stack" "data" {
  name         = "${var.name}-data"
  template_url = "https://${data.aws_s3_bucket.assets.bucket_regional_domain_name}/${aws_s3_object.file["data.template.json"].key}"
  capabilities = ["CAPABILITY_NAMED_IAM"]
  tags         = var.tags
}

resource "aws_cloudformation_stack" "api" {
  name         = "${var.name}-api"
  template_url = "https://${data.aws_s3_bucket.assets.bucket_regional_domain_name}/${aws_s3_object.file["api.template.json"].key}"
  parameters = {
    AssetsBucket = var.assets_bucket
    AssetsPrefix = "${var.assets_prefix}assets/"
  }
  capabilities = ["CAPABILITY_NAMED_IAM"]
  tags         = var.tags
  depends_on   = [aws_cloudformation_stack.data]
}

resource "aws_cloudformation_stack" "compute" {
  # With compute = "none" workers run elsewhere.
  count        = contains(local.files, "compute.template.json") ? 1 : 0
  name         = "${var.name}-compute"
  template_url = "https://${data.aws_s3_bucket.assets.bucket_regional_domain_name}/${aws_s3_object.file["compute.template.json"].key}"
  capabilities = ["CAPABILITY_NAMED_IAM"]
  tags         = var.tags
  depends_on   = [aws_cloudformation_stack.api]
}

output "bucket" {
  description = "The bucket that files are dropped into."
  value       = aws_cloudformation_stack.data.outputs["BucketName"]
}

output "api_url" {
  description = "The API's address."
  value       = lookup(aws_cloudformation_stack.api.outputs, "ApiUrl", "")
}
