"""The HTTP load client: sockets, streams, dialects, schedules, and checks of replies."""
