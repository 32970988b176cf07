"""What this process holds, for whom, until when, and who is told of a loss."""
