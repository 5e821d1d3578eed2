"""What of a configuration or command line cannot be honoured, and how users are told."""
