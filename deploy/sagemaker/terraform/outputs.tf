output "endpoint" {
  description = "Name to invoke."
  value       = aws_sagemaker_endpoint.this.name
}
