"""Other vendors' chat APIs: their requests as chats, and answers of chats in their forms."""
