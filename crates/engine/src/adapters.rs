//! Adapters (LoRA) of an engine: handles, limits, and the adapters of a request.
//!
//! An [`Adapter`] is a counted handle. Requests hold it until they end. The engine loads a few pairs of matrices between
//! two steps, so that running answers continue. The digest of matrices and scales is a part of the first key of a text,
//! so tiers and events need no rules of their own.
//!
//! `paguro_model::adapter` reads files and finds the matrices that they name. The library finds the base of an adapter.
//! The server has the names of adapters, plans their memory, and loads one with its first request (`models/adapters.rs`
//! there).

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
        mpsc::{SyncSender, sync_channel},
    },
    time::{Duration, Instant},
};

use paguro_backend::{AdapterId, AdapterWork, LoadError, LowRank, Matrix, Runner};
use sha2::{Digest, Sha256};

use crate::{
    Handle, SubmitError,
    handle::{Command, Port},
};

/// Time that the engine thread spends on loading adapters between two steps, and on one more piece.
const LOAD_TIME: Duration = Duration::from_millis(5);
/// Elements of a pair that the engine thread loads at once, unless a few ranks have more.
const PIECE: usize = 1 << 20;
/// Ranks of a piece are a multiple of this.
const PIECE_RANKS: usize = 8;

/// Adapters that an engine may have at the same time. One that was replaced counts until its requests have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdapterLimits {
    /// Number of adapters.
    pub count: usize,
    /// Rank of a pair.
    pub rank: usize,
    /// Bytes of all pairs.
    pub bytes: u64,
}

impl Default for AdapterLimits {
    fn default() -> Self {
        Self { count: 32, rank: 256, bytes: 4 << 30 }
    }
}

/// An adapter to load.
#[derive(Clone, Debug)]
pub struct AdapterWeights {
    /// Its name for routers.
    pub name: Arc<str>,
    /// The changes of matrices. Their bytes should be in memory, because the engine thread reads them.
    pub pairs: Vec<LowRank>,
}

/// An adapter of an engine. It is unloaded when the last clone is dropped, of which each of its requests has one until its end.
#[derive(Clone, Debug)]
pub struct Adapter(Arc<Loaded>);

#[derive(Debug)]
struct Loaded {
    id: AdapterId,
    name: Arc<str>,
    digest: [u8; 32],
    rank: usize,
    bytes: u64,
    waiting: AtomicUsize,
    running: AtomicUsize,
    handle: Handle,
}

impl Adapter {
    /// Returns the name that it was loaded with.
    pub fn name(&self) -> &Arc<str> {
        &self.0.name
    }

    /// Returns the hash of everything that results depend on.
    pub fn digest(&self) -> [u8; 32] {
        self.0.digest
    }

    /// Returns the largest rank.
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// Returns the bytes of its matrices.
    pub fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// Returns the numbers of requests that wait and that run.
    pub fn requests(&self) -> (usize, usize) {
        (self.0.waiting.load(Relaxed), self.0.running.load(Relaxed))
    }

    pub(crate) fn id(&self) -> AdapterId {
        self.0.id
    }

    /// Returns an adapter that no engine has loaded.
    #[cfg(test)]
    pub(crate) fn without_engine(id: u32, digest: [u8; 32]) -> Self {
        use crate::{
            Stats,
            handle::{Queue, Shared},
            request::{PictureLimits, RequestLimits},
        };

        let limits = RequestLimits {
            pictures: PictureLimits::TextOnly,
            vocab: 0,
            token_ids: 0,
            max_context: 0,
            max_sequences: 0,
            is_encoder: false,
        };
        let shared = Shared::new(limits, Queue::new(0, None), None, Vec::new(), Stats::default());
        shared.adapters().count += 1;
        let (commands, _) = std::sync::mpsc::channel();
        let handle = Handle::new(Port { number: 0, shared: Arc::new(shared), commands });
        let (waiting, running) = Default::default();
        let name = format!("adapter-{id}").into();
        Self(Arc::new(Loaded {
            id: AdapterId(id),
            name,
            digest,
            rank: 1,
            bytes: 0,
            waiting,
            running,
            handle,
        }))
    }

    pub(crate) fn is_of(&self, handle: &Handle) -> bool {
        Arc::ptr_eq(&self.0.handle.ports[0].shared, &handle.ports[0].shared)
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        let mut held = self.handle.shared().adapters();
        held.count -= 1;
        held.bytes -= self.bytes;
        for port in &*self.handle.ports {
            // Without an engine there is no adapter.
            let _ = port.commands.send(Command::UnloadAdapter(self.id));
        }
    }
}

/// Adapters that exist or are loading.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HeldAdapters {
    next: u32,
    count: usize,
    bytes: u64,
}

/// Reason for which an adapter was not loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdapterError {
    /// The engine has no room for it.
    #[error("adapter `{name}` {problem}")]
    Limit {
        /// Its name.
        name: Arc<str>,
        /// The limit.
        problem: String,
    },
    /// The device refused it.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The engine is gone or going.
    #[error(transparent)]
    Stopped(#[from] SubmitError),
}

impl Handle {
    /// Checks that there is room for an adapter, before its matrices are read.
    ///
    /// # Errors
    /// [`AdapterError::Limit`]
    pub fn check_adapter(&self, name: &Arc<str>, rank: usize, bytes: u64) -> Result<(), AdapterError> {
        self.check_limits(&self.shared().adapters(), name, rank, bytes)
    }

    fn check_limits(
        &self,
        held: &HeldAdapters,
        name: &Arc<str>,
        rank: usize,
        bytes: u64,
    ) -> Result<(), AdapterError> {
        let limits = self.shared().adapter_limits;
        let refuse = |problem: String| Err(AdapterError::Limit { name: name.clone(), problem });
        if rank > limits.rank {
            return refuse(format!("has rank {rank}, more than the {} of --max-lora-rank", limits.rank));
        }
        if held.count >= limits.count {
            return refuse(format!("is one more than the {} of --max-loras", limits.count));
        }
        if held.bytes.saturating_add(bytes) > limits.bytes {
            let (used, most) = (held.bytes >> 20, limits.bytes >> 20);
            let own = bytes >> 20;
            return refuse(format!(
                "has {own} MiB, and others have {used} MiB of the {most} MiB of --max-lora-memory; unload one"
            ));
        }
        Ok(())
    }

    /// Loads an adapter beside running requests, and blocks until it can be used. Of several engines, one that fails and cannot load it
    /// is stopped, because requests may go to any.
    ///
    /// # Errors
    /// [`AdapterError`]
    pub fn load_adapter(&self, weights: AdapterWeights) -> Result<Adapter, AdapterError> {
        let AdapterWeights { name, pairs } = weights;
        let rank = pairs.iter().map(LowRank::rank).max().unwrap_or(0);
        let bytes = pairs.iter().fold(0, |sum: u64, pair| sum.saturating_add(pair.bytes()));
        let digest = digest_of(&pairs)?;
        let id = {
            let mut held = self.shared().adapters();
            self.check_limits(&held, &name, rank, bytes)?;
            held.count += 1;
            held.bytes += bytes;
            held.next = held.next.wrapping_add(1);
            AdapterId(held.next)
        };
        let (waiting, running) = Default::default();
        // From here on, its drop returns what it holds.
        let handle = self.clone();
        let adapter = Adapter(Arc::new(Loaded { id, name, digest, rank, bytes, waiting, running, handle }));
        let pieces = pairs.into_iter().map(|pair| pieces(pair, PIECE)).collect::<Result<Vec<_>, _>>()?;
        let pairs: Vec<LowRank> = pieces.into_iter().flatten().collect();
        let load = |port: &Port| {
            let (reply, answer) = sync_channel(1);
            let sent = port.commands.send(Command::LoadAdapter { id, pairs: pairs.clone(), reply });
            sent.is_ok().then_some(answer)
        };
        // All load it at the same time.
        let answers: Vec<_> = self.ports.iter().map(load).collect();
        let mut is_loaded = false;
        for (port, answer) in self.ports.iter().zip(answers) {
            let loaded = answer.and_then(|answer| answer.recv().ok());
            match loaded.map(|loaded| loaded.and_then(|work| work.map_or(Ok(()), |work| work()))) {
                Some(Ok(())) => is_loaded = true,
                Some(Err(_)) if port.is_failing() && !self.is_failing() => {
                    let _ = port.commands.send(Command::Stop { finish: false });
                }
                Some(Err(error)) => return Err(error.into()),
                None => {}
            }
        }
        if is_loaded { Ok(adapter) } else { Err(self.stopped().into()) }
    }
}

/// Divides a pair into pairs of fewer ranks, which add up to it and have about `size` elements each. A pair that does not fit its
/// matrix stays whole: the runner refuses it.
pub(crate) fn pieces(pair: LowRank, size: usize) -> Result<Vec<LowRank>, LoadError> {
    let LowRank { matrix, a, b, scale } = &pair;
    let of_rank = a.cols.saturating_add(b.rows).max(1);
    let most = (size / of_rank / PIECE_RANKS * PIECE_RANKS).max(PIECE_RANKS);
    let (row_of_a, row_of_b) = (a.format.row_bytes(a.cols), b.format.row_bytes(b.cols));
    let fits = |side: &Matrix, row: usize| side.rows.checked_mul(row) == Some(side.bytes.len());
    let is_plain = !a.format.is_quantized() && !b.format.is_quantized() && a.rows == b.cols;
    if pair.rank() <= most || !is_plain || !fits(a, row_of_a) || !fits(b, row_of_b) {
        return Ok(vec![pair]);
    }
    let (element, columns) = (b.format.block_bytes(), b.read()?);
    let piece = |first: usize| {
        let end = a.rows.min(first + most);
        let mut bytes = Vec::with_capacity(b.rows * (end - first) * element);
        let rows = columns.chunks_exact(row_of_b);
        rows.for_each(|row| bytes.extend_from_slice(&row[first * element..end * element]));
        let b = Matrix { cols: end - first, bytes: bytes.into(), ..b.clone() };
        let a =
            Matrix { rows: end - first, bytes: a.bytes.slice(first * row_of_a..end * row_of_a), ..a.clone() };
        LowRank { matrix: *matrix, a, b, scale: *scale }
    };
    Ok((0..a.rows).step_by(most).map(piece).collect())
}

/// Returns the hash of everything that results with an adapter depend on.
fn digest_of(pairs: &[LowRank]) -> Result<[u8; 32], LoadError> {
    let mut hash = Sha256::new();
    // Pieces change the order of sums.
    hash.update([PIECE, PIECE_RANKS].map(|size| size as u64).map(u64::to_le_bytes).concat());
    for LowRank { matrix, a, b, scale } in pairs {
        hash.update(matrix.0.to_le_bytes());
        hash.update(scale.to_bits().to_le_bytes());
        for side in [a, b] {
            hash.update(side.format.name());
            hash.update([side.rows, side.cols].map(|len| len as u64).map(u64::to_le_bytes).concat());
            hash.update(side.read()?);
        }
    }
    Ok(hash.finalize().into())
}

/// Adapters of a request, with their scales.
#[derive(Clone, Debug, Default)]
pub(crate) struct RequestAdapters {
    pub uses: Vec<(Adapter, f32)>,
    /// Hash of all; `None` without adapters.
    pub digest: Option<[u8; 32]>,
    /// Name of all for routers: that of the only one, if its scale is one.
    pub name: Option<Arc<str>>,
}

impl RequestAdapters {
    /// Returns these adapters, without those whose scale is zero.
    pub fn new(adapters: &[(Adapter, f32)]) -> Self {
        let uses: Vec<_> = adapters.iter().filter(|(_, scale)| *scale != 0.0).cloned().collect();
        let mut hash = Sha256::new();
        for (adapter, scale) in &uses {
            hash.update(adapter.0.digest);
            hash.update(scale.to_bits().to_le_bytes());
        }
        let name = |(adapter, scale): &(Adapter, f32)| match *scale {
            1.0 => adapter.0.name.to_string(),
            scale => format!("{}:{scale}", adapter.0.name),
        };
        let names: Vec<String> = uses.iter().map(name).collect();
        let exists = !uses.is_empty();
        Self {
            digest: exists.then(|| hash.finalize().into()),
            name: exists.then(|| names.join("+").into()),
            uses,
        }
    }

    /// Counts a request that waits.
    pub fn enter(&self) {
        for (adapter, _) in &self.uses {
            adapter.0.waiting.fetch_add(1, Relaxed);
        }
    }

    /// Counts a waiting request that runs.
    pub fn start(&self) {
        self.leave(false);
        for (adapter, _) in &self.uses {
            adapter.0.running.fetch_add(1, Relaxed);
        }
    }

    /// Counts the end of a request that waited or ran.
    pub fn leave(&self, ran: bool) {
        for (adapter, _) in &self.uses {
            let counter = if ran { &adapter.0.running } else { &adapter.0.waiting };
            counter.fetch_sub(1, Relaxed);
        }
    }
}

/// Receives the end of a load, with work for the thread that waits for it.
pub(crate) type LoadReply = SyncSender<Result<Option<AdapterWork>, LoadError>>;

/// An adapter that the engine thread loads, a few pairs at a time.
#[derive(Debug)]
pub(crate) struct Loading {
    pub id: AdapterId,
    pub pairs: Vec<LowRank>,
    /// Number of pairs that are loaded.
    pub done: usize,
    pub reply: LoadReply,
}

impl Loading {
    /// Loads pairs for a few milliseconds. Returns true at the end, which it has reported.
    pub fn advance(&mut self, runner: &mut dyn Runner) -> bool {
        let begin = Instant::now();
        loop {
            let next = self.done..self.pairs.len().min(self.done + 1);
            let result = runner.load_adapter(self.id, &self.pairs[next.clone()]);
            self.done = next.end;
            if result.is_err() || self.done == self.pairs.len() {
                // The caller may have gone. Its adapter is then unloaded by the next command.
                let _ = self.reply.send(result.map(|()| runner.prepare_adapters()));
                return true;
            }
            if begin.elapsed() >= LOAD_TIME {
                return false;
            }
        }
    }
}
