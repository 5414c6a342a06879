//! Tests of the whole engine: plans as data, random schedules, threads, and the reference backend.

mod adapters;
mod answers;
mod checkpoints;
mod clients;
mod disk;
mod drafts;
mod events;
pub(crate) mod fake;
mod floods;
mod host;
mod limits;
mod live;
mod masks;
mod model_drafts;
mod oracle;
mod plans;
mod random;
mod real;
mod replicas;
mod rig;
mod script;
mod shares;
mod sharing;
mod trained_head;
mod turns;
