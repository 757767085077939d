"""What the gateway tells of itself. Knows no request's text."""
