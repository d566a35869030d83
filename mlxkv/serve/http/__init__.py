"""HTTP by uvicorn and Starlette, requests, and the chat page. Nothing here computes, or touches a cache."""
