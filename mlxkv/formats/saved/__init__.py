"""What saved caches and sessions say about themselves: headers, entries, checks. Both tracks read them; arrays
are packed elsewhere."""
