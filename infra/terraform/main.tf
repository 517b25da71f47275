# A deployment with Terraform: the templates of `make template` as CloudFormation stacks.
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
  description = "The output folder of `make template`."
  type        = string
}

variable "name" {
  description = "The deployment's name in its configuration."
  type        = string
  default     = "tidemill"
}

variable "assets_bucket" {
  description = "A bucket in the deployment's region, for templates and Lambda code."
  type        = string
}

variable "assets_prefix" {
  description = "The prefix of their keys."
  type        = string
  default     = "tidemill/"
}

variable "tags" {
  description = "Tags of the stacks, which CloudFormation passes to their resources."
  type        = map(string)
  default     = {}
}

locals {
  files = fileset(var.templates, "**")
  # A template's key contains its digest: CloudFormation reads a changed URL again.
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
  description = "The bucket for dropped files."
  value       = aws_cloudformation_stack.data.outputs["BucketName"]
}

output "api_url" {
  description = "The API's address."
  value       = lookup(aws_cloudformation_stack.api.outputs, "ApiUrl", "")
}
