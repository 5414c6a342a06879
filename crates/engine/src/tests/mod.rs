//! Tests of the whole engine: plans as data, random schedules, threads, and the reference backend.

mod checkpoints;
mod disk;
mod events;
mod fake;
mod host;
mod live;
mod plans;
mod random;
mod real;
mod rig;
mod script;
mod shares;
mod turns;
