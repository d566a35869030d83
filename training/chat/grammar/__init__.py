"""A small grammar of what people type: phrases with choices, clauses of many verbs, frames, ways to ask."""
