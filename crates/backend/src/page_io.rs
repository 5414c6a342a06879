//! Copies of pages to the host and back.

use crate::{Limits, PageId, StepError};

/// The arrangement and the origin of a runner's pages. Bytes that were read from a runner may be written to another one of
/// the same model if the formats of both are equal.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PageFormat {
    /// Identifies everything that the bits of a page depend on besides the program, the weights and the tokens: the
    /// backend, the arrangement and the type of K and V, the version of the kernels, and the instruction set or the
    /// device with its driver.
    pub name: String,
    /// Bytes of one page.
    pub page_bytes: usize,
}

/// The content of pages that are written from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PageContent {
    /// K and V of a full block.
    Kv {
        /// The K/V group.
        group: usize,
    },
    /// A part of a state, as [`PageMove::SaveState`](crate::PageMove::SaveState) leaves it.
    State,
}

impl PageFormat {
    /// Checks that the pages exist and that a buffer of `bytes` bytes holds as many.
    ///
    /// # Errors
    /// [`StepError::Invalid`]
    pub fn check(&self, pages: &[PageId], bytes: usize, limits: &Limits) -> Result<(), StepError> {
        if let Some(page) = pages.iter().find(|page| page.0 as usize >= limits.pages) {
            return Err(StepError::Invalid(format!("{page:?} of {} pages", limits.pages)));
        }
        if bytes != pages.len() * self.page_bytes {
            let (pages, size) = (pages.len(), self.page_bytes);
            return Err(StepError::Invalid(format!("{bytes} bytes for {pages} pages of {size} bytes")));
        }
        Ok(())
    }
}
