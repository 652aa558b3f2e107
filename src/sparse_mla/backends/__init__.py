"""What each backend supports, as data, and the choice between them with its reasons."""
