"""Shapes of models: by name, from a configuration, from arguments."""
