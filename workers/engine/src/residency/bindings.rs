//! A segment's parameters, ready to be computed with.

use candle_core::{Device, Result as TensorResult, Tensor};

use super::declare::{ConvId, Declarations, LayerSpec, LinearId, NormId, Parameter, TableId, UpsampleId};
use super::executor::ExecutorError;
use crate::formats::{WeightSet, WeightsError};
use crate::ops::{Conv2d, Linear, UpsampleConv2d};

/// Where a segment's numbers come from.
pub trait ParameterSource: Send + Sync {
    /// Appends the numbers of `parameter`, row-major, to `out`.
    ///
    /// # Errors
    /// If the parameter is missing or of another shape.
    fn append(&self, parameter: &Parameter, out: &mut Vec<f32>) -> Result<(), WeightsError>;

    /// The numbers of `parameter` will not be read soon: what the system keeps of them in memory may go.
    fn let_go(&self, _parameter: &Parameter) {}
}

impl ParameterSource for WeightSet {
    fn append(&self, parameter: &Parameter, out: &mut Vec<f32>) -> Result<(), WeightsError> {
        let shapes: Vec<&[usize]> = parameter.shapes.iter().map(Vec::as_slice).collect();
        self.append_f32(&parameter.name, &shapes, out)
    }

    fn let_go(&self, parameter: &Parameter) {
        WeightSet::let_go(self, &parameter.name);
    }
}

/// Scale and shift of a normalisation, `[C]` each.
#[derive(Clone, Debug)]
struct Norm {
    weight: Tensor,
    bias: Tensor,
}

/// The bound layers of one segment. A handle is valid in the bindings of the segment that declared it.
#[derive(Debug, Default)]
pub struct Bindings {
    linears: Vec<Linear>,
    convs: Vec<Conv2d>,
    upsamples: Vec<UpsampleConv2d>,
    norms: Vec<Norm>,
    tables: Vec<Tensor>,
    bytes: u64,
}

impl Bindings {
    /// Reads and packs everything that `declarations` name.
    ///
    /// # Errors
    /// If a tensor is missing or of another shape.
    pub fn bind(declarations: &Declarations, source: &dyn ParameterSource) -> Result<Self, ExecutorError> {
        let mut bindings = Self::default();
        for layer in declarations.layers() {
            bindings.bind_layer(layer, source)?;
        }
        Ok(bindings)
    }

    fn bind_layer(&mut self, layer: &LayerSpec, source: &dyn ParameterSource) -> Result<(), ExecutorError> {
        match layer {
            LayerSpec::Linear { parts: _, input, outputs, bias } => {
                let rows: usize = outputs.iter().sum();
                let (mut weight, mut shift) = (Vec::with_capacity(rows * input), Vec::new());
                for parameter in layer.parameters() {
                    let into = if parameter.shapes[0].len() == 1 { &mut shift } else { &mut weight };
                    source.append(&parameter, into)?;
                }
                let weight = tensor(weight, &[rows, *input])?;
                let shift = if *bias { Some(tensor(shift, &[rows])?) } else { None };
                let linear = Linear::new(weight, shift)?;
                self.bytes += linear.bytes() as u64;
                self.linears.push(linear);
            }
            LayerSpec::Conv { shape, .. } => {
                let [weight, bias] = pair(layer, source)?;
                let conv = Conv2d::new(weight, Some(bias), shape.stride, shape.padding)?;
                self.bytes += conv.bytes() as u64;
                self.convs.push(conv);
            }
            LayerSpec::Upsample { .. } => {
                let [weight, bias] = pair(layer, source)?;
                let upsample = UpsampleConv2d::new(weight, Some(bias))?;
                self.bytes += upsample.bytes() as u64;
                self.upsamples.push(upsample);
            }
            LayerSpec::Norm { channels, .. } => {
                let [weight, bias] = pair(layer, source)?;
                self.bytes += 4 * 2 * *channels as u64;
                self.norms.push(Norm { weight, bias });
            }
            LayerSpec::Table { shape, .. } => {
                for parameter in layer.parameters() {
                    self.tables.push(read(&parameter, source)?);
                }
                self.bytes += 4 * shape.iter().product::<usize>() as u64;
            }
        }
        Ok(())
    }

    /// Bytes that the bound layers hold.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A fully connected layer.
    pub fn linear(&self, id: LinearId) -> &Linear {
        &self.linears[id.0]
    }

    /// A convolution.
    pub fn conv(&self, id: ConvId) -> &Conv2d {
        &self.convs[id.0]
    }

    /// An upsampling convolution.
    pub fn upsample(&self, id: UpsampleId) -> &UpsampleConv2d {
        &self.upsamples[id.0]
    }

    /// Scale and shift of a normalisation.
    pub fn norm(&self, id: NormId) -> (&Tensor, &Tensor) {
        let norm = &self.norms[id.0];
        (&norm.weight, &norm.bias)
    }

    /// A plain tensor.
    pub fn table(&self, id: TableId) -> &Tensor {
        &self.tables[id.0]
    }
}

fn tensor(data: Vec<f32>, shape: &[usize]) -> TensorResult<Tensor> {
    Tensor::from_vec(data, shape, &Device::Cpu)
}

fn read(parameter: &Parameter, source: &dyn ParameterSource) -> Result<Tensor, ExecutorError> {
    let shape = &parameter.shapes[0];
    let mut data = Vec::with_capacity(shape.iter().product());
    source.append(parameter, &mut data)?;
    Ok(tensor(data, shape)?)
}

/// Weight and bias of a layer that has exactly these.
fn pair(layer: &LayerSpec, source: &dyn ParameterSource) -> Result<[Tensor; 2], ExecutorError> {
    let parameters = layer.parameters();
    let [weight, bias] = parameters.as_slice() else {
        return Err(ExecutorError::Tensor(candle_core::Error::Msg(format!("{layer:?} is not a weight and a bias"))));
    };
    Ok([read(weight, source)?, read(bias, source)?])
}
