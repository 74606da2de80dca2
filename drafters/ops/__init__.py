"""The tensor work around the drafter's two models: `reference` says what each operation is."""
