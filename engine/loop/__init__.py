"""The step loop: plans, logits, tokens, and the thread that runs it."""
