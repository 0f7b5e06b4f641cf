"""Programs that write pages of the documents from code and tests; tests compare them."""
