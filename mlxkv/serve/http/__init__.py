"""HTTP with uvicorn and Starlette, and the chat page. No code here computes or touches a cache."""
