"""What a scheduler may believe."""
