"""Connections, requests and replies, and the chat page. Nothing here computes, or touches a cache."""
