"""`aerie bench quality`: greedy HumanEval answers with drafts and without, compared and run."""
