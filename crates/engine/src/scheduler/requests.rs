//! Begin and cancellation of requests.

use super::{Scheduler, outputs::finish};
use crate::{checked_request::CheckedRequest, request::FinishReason, sequence::Sequence};

impl Scheduler {
    /// Queues a request that was checked.
    pub fn submit(&mut self, request: CheckedRequest, prompt: Vec<u32>) {
        let active = self.running.iter().chain(self.waiting.values());
        self.ledger.enter(&request.tenant, active.map(|sequence| &sequence.request.tenant));
        let mut sequence = Sequence::new(request, prompt, &self.layout, &self.pages);
        sequence.sched.seniority = self.arrivals;
        self.arrivals += 1;
        sequence.sched.waits_since = self.step;
        sequence.compute_mask(Vec::new(), &mut self.mask_workers);
        self.waiting.insert(sequence.rank(), sequence);
    }

    /// Ends a request, or one branch of it; its pages are free at once.
    pub fn cancel(&mut self, request: u64, branch: Option<usize>) {
        for sequence in
            self.remove(|s| s.request.id == request && branch.is_none_or(|b| s.branches == (b..b + 1)))
        {
            finish(&sequence, &FinishReason::Cancelled, None, &mut self.events);
        }
    }

    pub fn cancel_all(&mut self) {
        for sequence in self.remove(|_| true) {
            finish(&sequence, &FinishReason::Cancelled, None, &mut self.events);
        }
    }
}
