"""What others may not do: run code, be sent keys, fill the memory, or answer without end."""
