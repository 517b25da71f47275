"""Who decides what comes next: a message, the schedule, and what becomes of dead messages."""
