# One SageMaker endpoint of this gateway: model, configuration, endpoint, and scaling if asked for.
#
#   terraform apply -var name=aerie -var image=... -var role_arn=... \
#     -var instance_type=ml.p5.4xlarge -var preset=gpt-oss-20b

terraform {
  required_version = ">= 1.5"
  required_providers {
    aws = {
      source = "hashicorp/aws"
      # Before 6.21 an endpoint stays on its old configuration, and only from March 2026 on the
      # provider knows the host image below.
      version = ">= 6.36"
    }
  }
}

locals {
  # SM_VLLM_PORT tells the gateway that it runs on SageMaker.
  environment = merge(
    { SM_VLLM_PORT = "8080" },
    var.preset == "" ? {} : { AERIE_PRESET = var.preset },
    var.environment,
  )
  # SageMaker's host image with driver 580, which CUDA 13 of the image needs. Several GPU types have
  # a driver as old as 470 otherwise, with which no engine starts.
  ami_for_type          = can(regex("^ml\\.[gp][0-9]", var.instance_type)) ? "al2023-ami-sagemaker-inference-gpu-4-1" : ""
  inference_ami_version = var.inference_ami_version == null ? local.ami_for_type : var.inference_ami_version
  # A model and a configuration cannot be changed: their names have a hash of what they hold.
  mark = substr(sha256(jsonencode([
    var.image, var.role_arn, var.instance_type, var.instances, var.model_data, var.startup_s,
    local.environment, local.inference_ami_version,
  ])), 0, 8)
  resource = "${var.name}-${local.mark}"
}

resource "aws_sagemaker_model" "this" {
  name               = local.resource
  execution_role_arn = var.role_arn

  primary_container {
    image       = var.image
    environment = local.environment

    dynamic "model_data_source" {
      for_each = var.model_data == "" ? [] : [var.model_data]
      content {
        s3_data_source {
          s3_uri           = model_data_source.value
          s3_data_type     = "S3Prefix"
          compression_type = "None"
        }
      }
    }
  }

  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_sagemaker_endpoint_configuration" "this" {
  name = local.resource

  production_variants {
    variant_name                                      = "all"
    model_name                                        = aws_sagemaker_model.this.name
    instance_type                                     = var.instance_type
    initial_instance_count                            = var.instances
    container_startup_health_check_timeout_in_seconds = var.startup_s
    model_data_download_timeout_in_seconds            = var.startup_s
    inference_ami_version                             = local.inference_ami_version == "" ? null : local.inference_ami_version

    routing_config {
      routing_strategy = "LEAST_OUTSTANDING_REQUESTS"
    }
  }

  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_sagemaker_endpoint" "this" {
  name                 = var.name
  endpoint_config_name = aws_sagemaker_endpoint_configuration.this.name
}

resource "aws_appautoscaling_target" "this" {
  count              = var.max_instances > var.instances ? 1 : 0
  service_namespace  = "sagemaker"
  resource_id        = "endpoint/${aws_sagemaker_endpoint.this.name}/variant/all"
  scalable_dimension = "sagemaker:variant:DesiredInstanceCount"
  min_capacity       = var.instances
  max_capacity       = var.max_instances
}

resource "aws_appautoscaling_policy" "this" {
  count              = length(aws_appautoscaling_target.this)
  name               = "${var.name}-concurrency"
  policy_type        = "TargetTrackingScaling"
  service_namespace  = "sagemaker"
  resource_id        = aws_appautoscaling_target.this[0].resource_id
  scalable_dimension = aws_appautoscaling_target.this[0].scalable_dimension

  target_tracking_scaling_policy_configuration {
    target_value = var.requests_per_instance

    predefined_metric_specification {
      predefined_metric_type = "SageMakerVariantConcurrentRequestsPerModelHighResolution"
    }

    scale_in_cooldown  = 600 # a new instance loads its model for minutes
    scale_out_cooldown = 60
  }
}
