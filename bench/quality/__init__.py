"""`aerie bench quality`: compare greedy HumanEval answers with drafts and without, and run them."""
