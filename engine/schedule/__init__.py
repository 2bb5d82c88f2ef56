"""What runs next: requests, their stages and the queues between them. Integers only."""
