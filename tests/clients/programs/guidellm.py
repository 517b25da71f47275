"""A benchmark of chats: ten requests, four at a time, and its report.

Point: `guidellm run --backend kind=openai_http,target=http://127.0.0.1:8000,model=NAME …`
"""
