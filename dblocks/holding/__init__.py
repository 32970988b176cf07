"""What this process holds, for whom and until when, and who hears of a loss."""
