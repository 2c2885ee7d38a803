"""What happens while tokens are generated: the slots that they take, and the parts that choose."""
