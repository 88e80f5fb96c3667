"""What is done at findings while a program runs."""
