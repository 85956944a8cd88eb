"""What keeps ranks in step: agreement, the order of collectives, and what they say when they hang."""
