"""The LM head with its loss, and the losses of multi-token prediction."""
