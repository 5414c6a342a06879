//! Commands of handles to the engine thread.

use paguro_backend::KernelCount;

use super::worker::{Client, Worker};
use crate::{adapters::Loading, encoder::Encoder, handle::Command, snapshot::Snapshot};

impl Worker {
    /// Returns the kernel statistics of the model and of its vision tower.
    fn kernel_counts(&self) -> Vec<KernelCount> {
        let mut counts = self.runner.kernel_counts();
        counts.extend(self.encoder.iter().flat_map(Encoder::kernel_counts));
        counts
    }

    /// Executes a command, and publishes its effects.
    pub(super) fn obey(&mut self, command: Command) {
        match command {
            Command::Submit { events, .. } if self.stopping => drop(events),
            Command::Submit { checked, prompt, events } => {
                let open = checked.sampling.len();
                let adapters = checked.adapters.clone();
                adapters.enter();
                let client = Client { events, prompt_tokens: prompt.len(), adapters, open, started: false };
                self.clients.insert(checked.id, client);
                self.scheduler.submit(*checked, prompt);
            }
            Command::Cancel { request, branch } => self.scheduler.cancel(request, branch),
            Command::ClearCache => self.scheduler.clear_cache(),
            Command::OpenDisk(weights) => self.open_disk(weights.as_deref()),
            // The caller may have gone.
            Command::ExpertCounts(reply) => drop(reply.send(self.runner.expert_counts())),
            Command::KernelCounts(reply) => drop(reply.send(self.kernel_counts())),
            Command::Snapshot { kernels, reply } => {
                let kernels = kernels.then(|| self.kernel_counts());
                let pictures =
                    self.encoder.as_ref().map(|encoder| self.scheduler.pictures_snapshot(encoder.busy()));
                drop(reply.send(Snapshot::new(&self.scheduler, pictures, kernels)));
            }
            Command::LoadAdapter { id, pairs, reply } => {
                self.loading.push_back(Loading { id, pairs, done: 0, reply });
            }
            Command::UnloadAdapter(id) => {
                self.loading.retain(|loading| loading.id != id);
                self.runner.unload_adapter(id);
            }
            Command::CheckPages(reply) => drop(reply.send(self.check())),
            Command::Stop { finish } => {
                let _ = self.shared.stopped.set("it was shut down".into());
                self.stopping = true;
                if !finish {
                    self.scheduler.cancel_all();
                }
            }
        }
        self.publish();
    }
}
