"""An endpoint on Amazon SageMaker, with one command: see docs/sagemaker.md."""
