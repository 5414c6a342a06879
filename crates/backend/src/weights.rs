//! Weights of a file, by number.

use std::{borrow::Cow, fmt, io, ops::Range, sync::Arc};

use crate::{LoadError, MatrixId, StepError, TableId, VectorId, WeightFormat};

/// All weights of a program.
#[derive(Clone, Debug, Default)]
pub struct Weights {
    /// Matrices by [`MatrixId`].
    pub matrices: Vec<Matrix>,
    /// Norm weights and biases, by [`VectorId`].
    pub vectors: Vec<Vec<f32>>,
    /// Matrices of which steps read single rows, by [`TableId`]. Backends do not copy them: they are larger than the rest of
    /// a model.
    pub tables: Vec<Matrix>,
}

impl Weights {
    /// Returns the matrix with this id. Ids and matrices come from the same lowering.
    pub fn matrix(&self, id: MatrixId) -> &Matrix {
        &self.matrices[id.0 as usize]
    }

    /// Returns the table with this id.
    pub fn table(&self, id: TableId) -> &Matrix {
        &self.tables[id.0 as usize]
    }

    /// Returns the vector with this id.
    pub fn vector(&self, id: VectorId) -> &[f32] {
        &self.vectors[id.0 as usize]
    }

    /// Returns the bytes of all matrices in the memory of a backend's device.
    pub fn bytes_on(&self, backend: &dyn crate::Backend) -> u64 {
        let bytes = self.matrices.iter().map(|matrix| backend.device_layout(matrix).bytes as u64);
        bytes.fold(0, u64::saturating_add)
    }

    /// Checks that the files of all matrices have not changed since they were opened. Backends call it after reading,
    /// because weights of two versions of a file must not run.
    ///
    /// # Errors
    /// [`LoadError::Unreadable`], with the change.
    pub fn check_unchanged(&self) -> Result<(), LoadError> {
        let mut checked: Vec<*const ()> = Vec::new();
        for matrix in &self.matrices {
            let source = Arc::as_ptr(&matrix.bytes.source).cast();
            if !checked.contains(&source) {
                checked.push(source);
                matrix.bytes.source.check_unchanged().map_err(|error| matrix.unreadable(&error))?;
            }
        }
        Ok(())
    }
}

/// A matrix `[rows, cols]`, row by row, each row a whole number of the format's blocks; or a stack of such matrices, one
/// after the other, as a mixture of experts has them.
#[derive(Clone, Debug)]
pub struct Matrix {
    /// The tensor's name in its file, for errors.
    pub name: String,
    /// Encoding of a row.
    pub format: WeightFormat,
    /// Matrices in the stack; one for most.
    pub parts: usize,
    /// Outputs of each.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// `parts * rows * format.row_bytes(cols)` bytes.
    pub bytes: Bytes,
}

impl Matrix {
    /// Reads all rows into memory, unless they are in memory.
    ///
    /// # Errors
    /// [`LoadError::Unreadable`], if the source fails or has become shorter.
    pub fn read(&self) -> Result<Cow<'_, [u8]>, LoadError> {
        self.bytes.read().map_err(|error| self.unreadable(&error))
    }

    /// Reads rows `rows`, counted through all parts, into `buffer` unless they are in memory.
    ///
    /// # Errors
    /// As [`Matrix::read`].
    pub fn read_rows<'a>(
        &'a self,
        rows: Range<usize>,
        buffer: &'a mut Vec<u8>,
    ) -> Result<&'a [u8], LoadError> {
        let stride = self.format.row_bytes(self.cols);
        let part = rows.start * stride..rows.end * stride;
        self.bytes.read_part(part, buffer).map_err(|error| self.unreadable(&error))
    }

    /// Checks encoded rows of this matrix for values that are not finite, the first of them row `first`.
    ///
    /// # Errors
    /// [`LoadError::BadWeights`], with the first such row.
    pub fn check_finite(&self, rows: &[u8], first: usize) -> Result<(), LoadError> {
        let stride = self.format.row_bytes(self.cols);
        match rows.chunks_exact(stride).position(|row| !self.format.is_finite(row)) {
            None => Ok(()),
            Some(row) => Err(LoadError::BadWeights {
                tensor: self.name.clone(),
                problem: format!("row {} has values that are not finite; the file is damaged", first + row),
            }),
        }
    }

    /// Decodes row `row` of a table into `out`, `[cols]`; `buffer` is for its bytes.
    ///
    /// # Errors
    /// [`StepError::Device`], if the source fails, has become shorter, or has numbers that are not finite.
    pub fn decode_row(&self, row: usize, buffer: &mut Vec<u8>, out: &mut [f32]) -> Result<(), StepError> {
        let failed = |problem: String| StepError::Device(format!("tensor `{}`: {problem}", self.name));
        let stride = self.format.row_bytes(self.cols);
        let part = row * stride..(row + 1) * stride;
        let bytes = self.bytes.read_part(part, buffer).map_err(|error| failed(error.to_string()))?;
        if !self.format.is_finite(bytes) {
            return Err(failed(format!("row {row} has values that are not finite; the file is damaged")));
        }
        self.format.dequantize(bytes, out);
        Ok(())
    }

    /// Checks that the source of a table is still the one that was opened.
    ///
    /// # Errors
    /// [`StepError::Device`], with the change.
    pub fn check_source(&self) -> Result<(), StepError> {
        let failed = |error: io::Error| StepError::Device(format!("tensor `{}`: {error}", self.name));
        self.bytes.check_unchanged().map_err(failed)
    }

    fn unreadable(&self, error: &io::Error) -> LoadError {
        LoadError::Unreadable { tensor: self.name.clone(), problem: error.to_string() }
    }
}

/// A store of bytes that weights are read from: a file, a static slice, a vector.
pub trait ByteSource: Send + Sync {
    /// Returns the number of bytes.
    fn size(&self) -> u64;

    /// Returns all bytes, if they are in memory.
    fn in_memory(&self) -> Option<&[u8]> {
        None
    }

    /// Fills `out` with the bytes from `offset` on.
    ///
    /// # Errors
    /// The system's error; a source that ends before `out` is full is an error.
    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()>;

    /// Checks that the bytes have not changed since they were opened.
    ///
    /// # Errors
    /// The change.
    fn check_unchanged(&self) -> io::Result<()> {
        Ok(())
    }
}

impl ByteSource for Vec<u8> {
    fn size(&self) -> u64 {
        self.len() as u64
    }

    fn in_memory(&self) -> Option<&[u8]> {
        Some(self)
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        copy_from(self, offset, out)
    }
}

impl ByteSource for &'static [u8] {
    fn size(&self) -> u64 {
        self.len() as u64
    }

    fn in_memory(&self) -> Option<&[u8]> {
        Some(self)
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        copy_from(self, offset, out)
    }
}

fn copy_from(bytes: &[u8], offset: u64, out: &mut [u8]) -> io::Result<()> {
    let start = usize::try_from(offset).map_err(|_| io::ErrorKind::UnexpectedEof)?;
    let part = bytes.get(start..).and_then(|rest| rest.get(..out.len()));
    out.copy_from_slice(part.ok_or(io::ErrorKind::UnexpectedEof)?);
    Ok(())
}

/// A range of a source. Reading is explicit, because it may fail: a file can be truncated while it is open.
#[derive(Clone)]
pub struct Bytes {
    source: Arc<dyn ByteSource>,
    start: u64,
    len: usize,
}

impl Bytes {
    /// `len` bytes of `source` from `start` on.
    ///
    /// # Panics
    /// If the range is not inside; parsers check it first.
    pub fn new(source: Arc<dyn ByteSource>, start: u64, len: usize) -> Self {
        let end = start.checked_add(len as u64);
        assert!(end.is_some_and(|end| end <= source.size()), "range outside of its source");
        Self { source, start, len }
    }

    /// Returns the number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True without bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Reads all of them, unless they are in memory.
    ///
    /// # Errors
    /// The source's error.
    pub fn read(&self) -> io::Result<Cow<'_, [u8]>> {
        if let Some(bytes) = self.in_memory() {
            return Ok(Cow::Borrowed(bytes));
        }
        let mut bytes = vec![0; self.len];
        self.source.read_at(self.start, &mut bytes)?;
        Ok(Cow::Owned(bytes))
    }

    /// Reads a part of them into `buffer`, unless they are in memory.
    ///
    /// # Errors
    /// The source's error.
    ///
    /// # Panics
    /// If the part is out of range.
    pub fn read_part<'a>(&'a self, part: Range<usize>, buffer: &'a mut Vec<u8>) -> io::Result<&'a [u8]> {
        assert!(part.start <= part.end && part.end <= self.len);
        if let Some(bytes) = self.in_memory() {
            return Ok(&bytes[part]);
        }
        buffer.resize(part.len(), 0);
        self.source.read_at(self.start + part.start as u64, buffer)?;
        Ok(buffer)
    }

    /// Fills `out` with the bytes from `offset` on.
    ///
    /// # Errors
    /// The source's error.
    ///
    /// # Panics
    /// If they are not inside.
    pub fn read_at(&self, offset: usize, out: &mut [u8]) -> io::Result<()> {
        assert!(offset.checked_add(out.len()).is_some_and(|end| end <= self.len));
        self.source.read_at(self.start + offset as u64, out)
    }

    /// Checks that the bytes have not changed since they were opened.
    ///
    /// # Errors
    /// The change.
    pub fn check_unchanged(&self) -> io::Result<()> {
        self.source.check_unchanged()
    }

    /// Returns a part of these bytes, such as the rows of one matrix in a fused projection.
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len);
        Self { source: self.source.clone(), start: self.start + range.start as u64, len: range.len() }
    }

    fn in_memory(&self) -> Option<&[u8]> {
        Some(&self.source.in_memory()?[self.start as usize..][..self.len])
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Self {
        let len = bytes.len();
        Self { source: Arc::new(bytes), start: 0, len }
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Bytes({}..{})", self.start, self.start + self.len as u64)
    }
}
