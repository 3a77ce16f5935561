"""`primus-turbo trace`: what the overlapped collectives of a training run did, as a table and as a Chrome trace."""
