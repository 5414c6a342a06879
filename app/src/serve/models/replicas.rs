//! Engines of one model on several devices.

use std::{panic::resume_unwind, sync::Arc, thread};

use paguro_engine::{Engine, EngineOptions, FailureSink, MemoryPlan, Replicas};

use crate::{
    devices::Chosen,
    failure::{Failure, Outcome},
};

/// An engine that runs.
pub struct Started {
    /// The engine, or several as one.
    pub engine: Engine,
    /// Memory of one engine.
    pub memory: MemoryPlan,
    /// Name of its device, or of several.
    pub device: String,
}

/// Starts an engine of the model `name` on each of these devices, at the same time. One that does not start is left out with a warning,
/// so that a lost device takes no model away.
///
/// # Errors
/// That of the first device, if none starts.
pub fn start(
    name: &str,
    devices: &[Chosen],
    options: &EngineOptions,
    start: impl Fn(&Chosen, &EngineOptions) -> Outcome<Started> + Sync,
) -> Outcome<Started> {
    let replicas = Replicas::new(devices.len(), options.events.clone());
    let start_one = |number: usize, device: &Chosen| {
        let (model, on) = (name.to_owned(), device.main().backend.name().to_owned());
        let note = move |reason: &str| {
            tracing::error!(
                model,
                engine = number,
                device = on,
                reason,
                "an engine fails; requests go to the others"
            );
        };
        let options = EngineOptions { failures: Some(FailureSink(Arc::new(note))), ..options.clone() };
        start(device, &replicas.options(number, &options))
    };
    let started: Vec<Outcome<Started>> = thread::scope(|scope| {
        let start_one = &start_one;
        let threads: Vec<_> = devices
            .iter()
            .enumerate()
            .map(|(number, device)| scope.spawn(move || start_one(number, device)))
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
    });
    let (mut engines, mut names, mut memory, mut failure) = (Vec::new(), Vec::new(), None, None);
    for (number, started) in started.into_iter().enumerate() {
        match started {
            Ok(Started { engine, memory: own, device }) => {
                engines.push((number, engine));
                names.push(device);
                memory.get_or_insert(own);
            }
            Err(problem) => {
                let reason = problem.message();
                tracing::warn!(
                    model = name,
                    engine = number,
                    reason,
                    "an engine does not start, and is left out"
                );
                failure.get_or_insert(problem);
            }
        }
    }
    match (replicas.join(engines), memory) {
        (Some(engine), Some(memory)) => Ok(Started { engine, memory, device: names.join(", ") }),
        _ => Err(failure.unwrap_or_else(|| Failure::new("there is no device"))),
    }
}
