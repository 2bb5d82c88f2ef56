"""The embedded model: a small looped transformer on an exactly checkable task, and how it was trained."""
