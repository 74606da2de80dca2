variable "name" {
  description = "Name of the endpoint."
  type        = string
}

variable "image" {
  description = "This project's image in ECR."
  type        = string
}

variable "role_arn" {
  description = "Execution role: reads the image and the model's artefacts."
  type        = string
}

variable "instance_type" {
  description = "ml.p5.4xlarge, for example. `aerie models NAME` says what a preset needs."
  type        = string
}

variable "instances" {
  description = "Instances, or the fewest of them while scaling is on. Each update goes back to it."
  type        = number
  default     = 1
}

variable "max_instances" {
  description = "Most instances; more than `instances` turns scaling on."
  type        = number
  default     = 0
}

variable "requests_per_instance" {
  description = "Concurrent requests per instance at which scaling aims."
  type        = number
  default     = 32
}

variable "preset" {
  description = "A preset's name, or nothing."
  type        = string
  default     = ""
}

variable "model_data" {
  description = "s3://bucket/prefix/ with the files of /opt/ml/model, or nothing."
  type        = string
  default     = ""

  validation {
    condition     = var.model_data == "" || can(regex("^s3://.+/$", var.model_data))
    error_message = "Name a folder in S3, with a slash at its end."
  }
}

variable "environment" {
  description = "Further variables of the container: AERIE_* and SM_VLLM_*."
  type        = map(string)
  default     = {}
}

variable "inference_ami_version" {
  description = "SageMaker's host image. null: one with driver 580 for GPUs; \"\": SageMaker chooses."
  type        = string
  default     = null
}

variable "startup_s" {
  description = "Seconds within which /ping must say 200, downloading included."
  type        = number
  default     = 1800

  validation {
    condition     = var.startup_s >= 60 && var.startup_s <= 3600
    error_message = "SageMaker takes 60 to 3600 seconds."
  }
}
