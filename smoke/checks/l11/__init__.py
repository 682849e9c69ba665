"""The checks of L11: fewer bytes. What is rounded is near what was there, and products are those of what is stored."""
