"""The step loop: a plan, logits, tokens, and the thread that it runs in."""
