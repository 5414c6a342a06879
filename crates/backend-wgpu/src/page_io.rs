//! Bytes of pages on their way to the host: a buffer that the host reads, with a mark behind the pages.
//!
//! As for [steps](crate::canary), a driver may drop a submission without an error. A read only counts if its mark has arrived.

use paguro_backend::{Digest, Limits, LoadError, PageFormat, PageId, StepError, Visitor};

use crate::{
    NUMERICS,
    device::Device,
    emit::Model,
    plan::{Tiling, Wide},
    target::Target,
};

/// Most bytes of pages in one submission.
const BATCH: usize = 16 << 20;

/// Buffers for reading pages.
pub struct PageReader {
    /// Pages, and a mark behind them.
    host: wgpu::Buffer,
    /// Maximum number of pages.
    pages: usize,
    /// The mark on the device.
    mark: wgpu::Buffer,
    /// The last mark.
    last: u32,
}

/// Returns the format of a device's pages of `page_bytes` bytes.
pub fn format(device: &Device, limits: &Limits, tilings: &[Tiling], page_bytes: usize) -> PageFormat {
    let Device { driver, rules, target, .. } = device;
    let Target { name, subgroup, most_threads, as_hardware, is_software, .. } = target;
    let (kv, attention) = (limits.kv_dtype.name(), limits.attention.name());
    let layout = format!("{kv} {} {attention} {:016x}", limits.block_size, tiling_digest(tilings));
    let adapter = format!("{name}, {driver}, {subgroup} {most_threads} {as_hardware} {is_software}");
    let side = target.cooperative.unwrap_or(0);
    let choices = format!("{} {side} {}", rules.keeps_order, target.emulated);
    PageFormat { name: format!("gpu {NUMERICS} {layout} {adapter} {choices}"), page_bytes }
}

/// Returns a digest of the tiles and splits, on which the order of the sums in attention depends.
fn tiling_digest(tilings: &[Tiling]) -> u64 {
    let mut digest = Digest::default();
    for tiling in tilings {
        // The place where results become activations changes no sum.
        let &Tiling { rows, heads, workgroups, emits, emits_padded: _, always_merges, partials, busy, wide } =
            tiling;
        for number in [rows, heads, workgroups, partials, busy] {
            digest.number(number as u64);
        }
        digest.number(u64::from(emits) | u64::from(always_merges) << 1 | u64::from(wide.is_some()) << 2);
        if let Some(Wide { from, groups, rows, heads, workgroups, busy }) = wide {
            for number in [from, groups, rows, heads, workgroups, busy] {
                digest.number(number as u64);
            }
        }
    }
    digest.short()
}

impl PageReader {
    /// For pages of `page_bytes` bytes.
    ///
    /// # Errors
    /// No memory.
    pub fn new(device: &Device, page_bytes: usize) -> Result<Self, LoadError> {
        let pages = (BATCH / page_bytes.max(1)).max(1);
        Ok(Self {
            host: device.host_buffer(pages * page_bytes / 4 + 1, "pages for the host")?,
            pages,
            mark: device.buffer(1, "the mark of pages")?,
            last: 0,
        })
    }

    /// Copies pages into `out`, which has their size. Each page has `page_words` words in each buffer of the model.
    ///
    /// # Errors
    /// The device failed, or did not copy everything.
    pub fn read(
        &mut self,
        device: &Device,
        model: &Model,
        page_words: usize,
        pages: &[PageId],
        out: &mut [u8],
    ) -> Result<(), StepError> {
        let size = 4 * page_words;
        let page_bytes = size * 2 * model.pages.len();
        for (pages, out) in pages.chunks(self.pages).zip(out.chunks_mut(self.pages * page_bytes)) {
            self.last = self.last.wrapping_add(1);
            device.queue.write_buffer(&self.mark, 0, &self.last.to_le_bytes());
            let mut encoder = device.encoder();
            let mut at = 0;
            for page in pages {
                for buffer in model.pages.iter().flatten() {
                    let from = u64::from(page.0) * size as u64;
                    encoder.copy_buffer_to_buffer(buffer, from, &self.host, at, size as u64);
                    at += size as u64;
                }
            }
            encoder.copy_buffer_to_buffer(&self.mark, 0, &self.host, at, 4);
            let submission = device.queue.submit([encoder.finish()]);
            let mark = self.last.to_le_bytes();
            let mut arrived = false;
            device.read(&self.host, out.len() + 4, submission, |bytes| {
                let (pages, found) = bytes.split_at(out.len());
                arrived = found == mark;
                if arrived {
                    out.copy_from_slice(pages);
                }
            })?;
            if !arrived {
                return Err(StepError::Device(format!(
                    "{} did not copy pages to the host",
                    device.target.name
                )));
            }
        }
        Ok(())
    }
}
