"""What a store holds as a stream that any store can give and take."""
