"""Times the operators on a GPU beside their floors and whichever peers are installed."""
