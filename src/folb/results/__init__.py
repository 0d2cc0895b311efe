"""What a run leaves behind: its numbers, their summary, the JSON document."""
