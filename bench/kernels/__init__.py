"""Time operations of the drafting path against vLLM's: implementations (arms) and clock."""
