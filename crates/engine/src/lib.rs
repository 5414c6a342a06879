//! Sequences, pages, prefix cache, scheduler, stop conditions: one synchronous thread.
