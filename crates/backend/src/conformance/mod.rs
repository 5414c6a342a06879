//! The suite that every backend instantiates.
